"""The rules work on one rank alone; their tests need no communication and say so by a mark."""


def pytest_configure(config):
    config.addinivalue_line("markers", "serial: needs no communication; run on one rank only")
