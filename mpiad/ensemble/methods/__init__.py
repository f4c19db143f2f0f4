"""The methods, one a file: a published table, and the class that `solve` takes.

No other file knows a method by its name. docs/project/map.md says how to add one.
"""
