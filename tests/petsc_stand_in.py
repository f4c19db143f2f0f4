"""What `mpiad.linalg.petsc` calls of petsc4py, made of NumPy: it shows what it is given, and isn't PETSc."""

import sys
import types

import numpy as np
import scipy.sparse as sp
from mpi4py import MPI


def plain(comm):
    """Return a communicator; as petsc4py does, take mpi4py's own alone."""
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"expecting a Comm object, but got {type(comm).__name__}")
    return comm


class Vec:
    def createWithArray(self, array, comm):
        self.array, self.comm = array, plain(comm)
        return self

    def duplicate(self):
        return Vec().createWithArray(np.zeros_like(self.array), self.comm)

    def getArray(self):
        return self.array

    def setArray(self, array):
        self.array[...] = array


class Mat:
    def createAIJ(self, size, csr, comm):
        comm = plain(comm)
        indptr, indices, data = csr
        rows = sp.csr_matrix((data, indices, indptr), (size[0][0], size[1][1])).toarray()
        self.comm, self.dense = comm, np.concatenate(comm.allgather(rows))
        return self

    def createPython(self, size, context, comm):
        comm = plain(comm)
        lengths = comm.allgather(size[0][0])
        columns, start = [], sum(lengths[: comm.rank])
        for k in range(sum(lengths)):
            x, y = np.zeros(lengths[comm.rank]), np.zeros(lengths[comm.rank])
            if start <= k < start + len(x):
                x[k - start] = 1.0
            y = Vec().createWithArray(y, comm)
            context.mult(self, Vec().createWithArray(x, comm), y)
            columns.append(np.concatenate(comm.allgather(y.array)))
        self.comm, self.dense = comm, np.stack(columns, axis=1)
        return self

    def transpose(self):
        self.dense = self.dense.T.copy()
        return self

    def destroy(self):
        self.dense = None


class Options(dict):
    database = {}
    seen = []

    def __setitem__(self, name, value):
        Options.database[name] = value
        Options.seen.append((name.partition("_")[2].partition("_")[2], value))

    def delValue(self, name):
        del Options.database[name]


class KSP:
    class ConvergedReason:
        CONVERGED_RTOL, DIVERGED_ITS = 2, -3

    def create(self, comm):
        plain(comm)
        return self

    def setOptionsPrefix(self, prefix):
        self.prefix = prefix

    def setOperators(self, matrix):
        self.matrix = matrix

    def setTolerances(self, rtol, atol, max_it):
        self.rtol = rtol

    def setConvergenceHistory(self):
        self.history = []

    def setFromOptions(self):
        self.fails = Options.database.get(self.prefix + "ksp_type") == "fails"

    def solve(self, right, step):
        comm = self.matrix.comm
        whole = np.concatenate(comm.allgather(right.array))
        start = sum(comm.allgather(len(right.array))[: comm.rank])
        # As exact as asked for, and no more.
        found = np.linalg.solve(self.matrix.dense, whole) * (1 - self.rtol)
        step.array[...] = found[start : start + len(right.array)]
        self.history = [np.linalg.norm(whole), self.rtol * np.linalg.norm(whole)]

    def getConvergedReason(self):
        return -3 if self.fails else 2

    def getConvergenceHistory(self):
        return np.array(self.history)

    def destroy(self):
        pass


def install(monkeypatch):
    """Put the stand-in where petsc4py would be found."""
    package, module = types.ModuleType("petsc4py"), types.ModuleType("petsc4py.PETSc")
    for name, value in {"Vec": Vec, "Mat": Mat, "Options": Options, "KSP": KSP}.items():
        setattr(module, name, value)
    module.ScalarType, module.IntType = np.float64, np.int32
    package.PETSc = module
    monkeypatch.setitem(sys.modules, "petsc4py", package)
    monkeypatch.setitem(sys.modules, "petsc4py.PETSc", module)
    Options.seen.clear()
