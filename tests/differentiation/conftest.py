"""Local rules need no communication; their tests say so by a mark."""


def pytest_configure(config):
    config.addinivalue_line("markers", "serial: needs no communication; one rank is enough")
