"""The methods, one a file: a published table, and the class that `solve` takes.

Nothing else knows a method by its name. How to add one stands in docs/rooms.md: it takes ten minutes.
"""
