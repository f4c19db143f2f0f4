! The functions of MPI that the solvers call, as C declares them, since the MPI packages of PyPI contain no Fortran library.
! Handles are integers, as in MPICH and libraries with its binary interface (Intel MPI, MVAPICH, Cray MPICH).

module mpi_of_c
  use iso_c_binding
  implicit none
  integer(c_int), parameter :: double_precision = int(z'4c00080b', c_int), sum_of_all = int(z'58000003', c_int), no_rank = -1
  interface
    function mpi_comm_rank(comm, rank) bind(c, name="MPI_Comm_rank") result(ierr)
      import c_int
      integer(c_int), value :: comm
      integer(c_int), intent(out) :: rank
      integer(c_int) :: ierr
    end function
    function mpi_comm_size(comm, size) bind(c, name="MPI_Comm_size") result(ierr)
      import c_int
      integer(c_int), value :: comm
      integer(c_int), intent(out) :: size
      integer(c_int) :: ierr
    end function
    function mpi_comm_free(comm) bind(c, name="MPI_Comm_free") result(ierr)
      import c_int
      integer(c_int), intent(inout) :: comm
      integer(c_int) :: ierr
    end function
    function mpi_cart_create(comm, ndims, dims, periods, reorder, cart) bind(c, name="MPI_Cart_create") result(ierr)
      import c_int
      integer(c_int), value :: comm, ndims, reorder
      integer(c_int), intent(in) :: dims(*), periods(*)
      integer(c_int), intent(out) :: cart
      integer(c_int) :: ierr
    end function
    function mpi_cart_shift(cart, direction, disp, source, dest) bind(c, name="MPI_Cart_shift") result(ierr)
      import c_int
      integer(c_int), value :: cart, direction, disp
      integer(c_int), intent(out) :: source, dest
      integer(c_int) :: ierr
    end function
    function mpi_sendrecv(sent, scount, stype, dest, stag, received, rcount, rtype, source, rtag, comm, status) &
        bind(c, name="MPI_Sendrecv") result(ierr)
      import c_int, c_double
      real(c_double), intent(in) :: sent(*)
      real(c_double), intent(inout) :: received(*)
      integer(c_int), value :: scount, stype, dest, stag, rcount, rtype, source, rtag, comm
      integer(c_int), intent(out) :: status(*)
      integer(c_int) :: ierr
    end function
    function mpi_allreduce(sent, received, count, type, op, comm) bind(c, name="MPI_Allreduce") result(ierr)
      import c_int, c_double
      real(c_double), intent(in) :: sent(*)
      real(c_double), intent(out) :: received(*)
      integer(c_int), value :: count, type, op, comm
      integer(c_int) :: ierr
    end function
  end interface
end module
