"""How layouts are chosen: candidates by a fixpoint over the rules, the choice by an integer program."""
