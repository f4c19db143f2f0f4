# Package for Spack. Not built yet: the first release must be on PyPI, for its checksum.

from spack.package import *


class PyMpiad(PythonPackage):
    """Exact gradients of MPI programs in Python: automatic differentiation through every communication."""

    pypi = "mpiad/mpiad-0.1.0.tar.gz"

    license("MIT")

    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")  # of the release's file

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@64:", type="build")

    depends_on("py-mpi4py@4:", type=("build", "run"))
    depends_on("py-numpy@2.1.1:", type=("build", "run"))
    depends_on("py-autograd@1.9:", type=("build", "run"))
    depends_on("py-scipy@1.13:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.1:", type=("build", "run"))
    depends_on("py-llvmlite@0.45:", type=("build", "run"))
    depends_on("py-tqdm@4.64:", type=("build", "run"))

    import_modules = ["mpiad", "mpiad.inverse", "mpiad.ensemble"]

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def self_test(self):
        """Compute a gradient with one rank."""
        python("-m", "mpiad")
