"""Sharding rules: how each op may run over a mesh axis. `table` is the place to read; `prove` checks it."""

from fxpar.rules.lookup import register_rule, registered_rules, rule_for

__all__ = ["register_rule", "registered_rules", "rule_for"]
