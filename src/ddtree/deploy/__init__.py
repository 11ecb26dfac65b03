"""Services from one TOML file: what they are (`spec`), the files they run from (`render`), what would fail (`check`).

Imports neither torch nor an engine: what is looked at of the machine is the doctor's.
"""
