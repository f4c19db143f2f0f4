"""The interface to MPI: buffers, communicators, messages and collectives, without derivatives."""

from mpi4py.MPI import ANY_SOURCE, ANY_TAG, MAX, MIN, PROC_NULL, PROD, SUM, Op

from mpiad.transport.core.buffers import spec_of
from mpiad.transport.core.channels import Channel
from mpiad.transport.core.lookup import channel, member, prepare, renew
from mpiad.transport.core.messages import Envelope
from mpiad.transport.devices.device_arrays import Spec

__all__ = ["ANY_SOURCE", "ANY_TAG", "MAX", "MIN", "PROC_NULL", "PROD", "SUM", "Channel", "Envelope", "Op", "Spec"]
__all__ += ["channel", "member", "prepare", "renew", "spec_of"]
