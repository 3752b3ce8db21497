"""Sharding rules: how each ATen op may run over one mesh axis."""

from fxpar.rules.lookup import register_rule, rule_for

__all__ = ["register_rule", "rule_for"]
