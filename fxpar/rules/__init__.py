"""Sharding rules: how each op may run over a mesh axis. `table` is the place to read; `prove` checks it."""

from fxpar.rules.lookup import register_rule, rule_for

__all__ = ["register_rule", "rule_for"]
