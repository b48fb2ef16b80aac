"""Engines: the interface, SGLang behind it, and a scripted one."""
