"""Measures through public surfaces: `run` and `report` for the engine's modes, `smoke` for any server."""
