"""Communicators, messages and collectives of arrays and objects, and agreement of the ranks on errors."""
