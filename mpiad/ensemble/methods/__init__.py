"""The methods, one per file: a published table, in the class that users pass to `solve`.

docs/project/map.md describes how to add a method.
"""
