"""Ensembles of ordinary differential equations: each trajectory with its own time, step and error control."""

from mpiad.ensemble.algorithms import RK4, RK45, Tsit5
from mpiad.ensemble.backends import EnsembleSerial, EnsembleThreads, EnsembleVectorized
from mpiad.ensemble.controller import IController, PIController
from mpiad.ensemble.events import Event
from mpiad.ensemble.gpu import EnsembleGPU
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem, remake
from mpiad.ensemble.ranks import EnsembleMPI
from mpiad.ensemble.retcodes import ReturnCode
from mpiad.ensemble.solution import EnsembleSolution, ODESolution
from mpiad.ensemble.solve import solve

__all__ = [
    "RK4", "RK45", "EnsembleGPU", "EnsembleMPI", "EnsembleProblem", "EnsembleSerial", "EnsembleSolution", "EnsembleThreads",
    "EnsembleVectorized", "Event", "IController", "ODEProblem", "ODESolution", "PIController", "ReturnCode", "Tsit5",
    "remake", "solve",
]
