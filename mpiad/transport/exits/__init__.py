"""The consequences for all ranks if one of them raises an exception, leaves the program or is killed."""
