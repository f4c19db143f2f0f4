"""Ensembles of ordinary differential equations: each trajectory with its own time, step and error control."""

from mpiad.ensemble.backends import EnsembleGPU, EnsembleSerial, EnsembleThreads, EnsembleVectorized
from mpiad.ensemble.batch_sum import BatchSum, SummedSolution
from mpiad.ensemble.controller import PIController
from mpiad.ensemble.event import Event
from mpiad.ensemble.fit import FitResult, FitStarts, fit
from mpiad.ensemble.interpolation import CubicSpline, interp
from mpiad.ensemble.methods.bogacki_shampine import BS3
from mpiad.ensemble.methods.classic import RK4
from mpiad.ensemble.methods.dormand_prince import RK45
from mpiad.ensemble.methods.shampine_reichelt import Rosenbrock23
from mpiad.ensemble.methods.steinebach import Rodas5P
from mpiad.ensemble.methods.tsitouras import Tsit5
from mpiad.ensemble.methods.verner import Vern7
from mpiad.ensemble.outcome import ConvergenceCode, ReturnCode
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem, remake
from mpiad.ensemble.ranks import EnsembleMPI
from mpiad.ensemble.solution import EnsembleSolution, ODESolution
from mpiad.ensemble.solve import solve
from mpiad.ensemble.steady_state import SteadyStateSolution, steady_state

__all__ = [
    "BS3", "RK4", "RK45", "BatchSum", "ConvergenceCode", "CubicSpline", "EnsembleGPU", "EnsembleMPI", "EnsembleProblem",
    "EnsembleSerial", "EnsembleSolution", "EnsembleThreads", "EnsembleVectorized", "Event", "FitResult", "FitStarts",
    "ODEProblem", "ODESolution", "PIController", "ReturnCode", "Rodas5P", "Rosenbrock23", "SteadyStateSolution",
    "SummedSolution", "Tsit5", "Vern7", "fit", "interp", "remake", "solve", "steady_state",
]  # fmt: skip
__dir__ = __all__.copy
