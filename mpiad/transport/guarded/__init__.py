"""Communication under watch: waits with a deadline, and ranks that agree on a call before they communicate.

Off, a `Channel` holds bare communicators of mpi4py. On, it holds `communicator.Guarded` ones, which have the same methods:
`timed_waits` polls with the deadline, `call_agreement` compares `descriptions` before a collective, `message_headers` sends
a header with each message, and `status` answers other ranks' questions about this one and makes the wait-for
table. `switch` turns it all on and off.
"""
