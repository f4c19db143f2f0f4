"""The user's f as straight-line arithmetic on scalars: traced, simplified, differentiated, written as source text."""
