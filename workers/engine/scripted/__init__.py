"""An engine that replays a script: tokens, bytes, delays, failures, crashes. For tests and load tests."""

from __future__ import annotations

from inferbus.workers.engine.scripted.engine import ScriptedEngine
from inferbus.workers.engine.scripted.script import Fault, Rule, Script, load
from inferbus.workers.engine.scripted.text import ByteTokenizer

__all__ = ["ByteTokenizer", "Fault", "Rule", "Script", "ScriptedEngine", "load"]
