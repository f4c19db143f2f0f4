"""Communication under the watch: waits with a deadline, and ranks that compare their calls before they communicate.

Without the watch, a `Channel` holds mpi4py's communicators; with it, `communicator.Guarded` ones with the same methods.
`timed_waits` polls with the deadline, `call_agreement` compares calls before a collective, `message_headers` sends
a header with each message, `status` makes the table of a deadlock, and `switch` turns the watch on and off. `program_calls`
watches the program's own calls of mpi4py, for `mpiad.debug.watch`, and `deadlock_proof` decides whether they can't end.
"""
