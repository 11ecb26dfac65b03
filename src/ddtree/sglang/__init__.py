"""DDTREE inside stock SGLang: a plug-in by SGLang's own entry point and registry. SGLang loads `plugin.register`.

Importing this room needs no SGLang; the modules that do need it are imported by the hooks that SGLang calls.
"""
