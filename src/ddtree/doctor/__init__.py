"""What of this machine would break an engine, before its first start: probe -> facts -> rules -> findings.

Imports nothing heavy; what may crash is imported in child processes (`child.py`).
"""

from ddtree.doctor.apply import Finding
from ddtree.doctor.facts import Asked, Facts
from ddtree.doctor.judge import Diagnosis, judge
from ddtree.doctor.reading import load
from ddtree.doctor.rules import ENGINES, Tables

__all__ = ["ENGINES", "Asked", "Diagnosis", "Facts", "Finding", "Tables", "judge", "load"]
