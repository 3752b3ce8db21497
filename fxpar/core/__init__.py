"""The native core (csrc/) as typed functions, a module for each of its parts. Calls release the GIL."""
