! Heat conduction in a plate, u_t = div(kappa grad u), with MPI, and its adjoint.
!
! The plate is divided among the ranks along x: a rank has nx columns of ny cells. The ends in x are insulated. The temperature
! below is zero, and wall(i) above column i. A step adds the fluxes through the four sides of each cell; the time step is
! contained in kappa, which is averaged between cells.

module heat
  use mpi_of_c
  implicit none
  private
  public :: heat_run, heat_run_b

contains

  ! Run some steps: u is the temperature after them.
  subroutine heat_run(comm, nx, ny, steps, kappa, wall, u0, u) bind(c)
    integer(c_int), value :: comm, nx, ny, steps
    real(c_double), intent(in) :: kappa(ny, nx), wall(nx), u0(ny, nx)
    real(c_double), intent(out) :: u(ny, nx)
    real(c_double), allocatable :: k(:, :), v(:, :)
    integer :: s
    allocate (k(ny, 0:nx + 1), v(ny, 0:nx + 1))
    k(:, 1:nx) = kappa
    v(:, 1:nx) = u0
    call fill(comm, nx, ny, k)
    do s = 1, steps
      call fill(comm, nx, ny, v)
      call step(nx, ny, k, wall, v, u)
      v(:, 1:nx) = u
    end do
    u = v(:, 1:nx)
  end subroutine

  ! The adjoint: from the cotangent ub of the result, add the cotangents of kappa, wall and u0.
  subroutine heat_run_b(comm, nx, ny, steps, kappa, kappab, wall, wallb, u0, u0b, ub) bind(c)
    integer(c_int), value :: comm, nx, ny, steps
    real(c_double), intent(in) :: kappa(ny, nx), wall(nx), u0(ny, nx), ub(ny, nx)
    real(c_double), intent(inout) :: kappab(ny, nx), wallb(nx), u0b(ny, nx)
    real(c_double), allocatable :: k(:, :), v(:, :, :), w(:, :)
    integer :: s
    ! The states before all steps are computed again, and kept.
    allocate (k(ny, 0:nx + 1), v(ny, 0:nx + 1, steps + 1), w(ny, 0:nx + 1))
    k(:, 1:nx) = kappa
    v(:, 1:nx, 1) = u0
    call fill(comm, nx, ny, k)
    do s = 1, steps
      call fill(comm, nx, ny, v(:, :, s))
      call step(nx, ny, k, wall, v(:, :, s), v(:, 1:nx, s + 1))
    end do
    w(:, 1:nx) = ub
    do s = steps, 1, -1
      call fill(comm, nx, ny, w)
      call step_b(nx, ny, k, kappab, wall, wallb, v(:, :, s), w)
    end do
    u0b = u0b + w(:, 1:nx)
  end subroutine

  ! Receive the columns of the neighbors; at the ends of the plate, copy the last column, so that no heat flows.
  subroutine fill(comm, nx, ny, a)
    integer(c_int), intent(in) :: comm, nx, ny
    real(c_double), intent(inout) :: a(ny, 0:nx + 1)
    integer(c_int) :: rank, size, left, right, ierr, status(8)
    ierr = mpi_comm_rank(comm, rank)
    ierr = mpi_comm_size(comm, size)
    left = merge(rank - 1, no_rank, rank > 0)
    right = merge(rank + 1, no_rank, rank < size - 1)
    a(:, 0) = a(:, 1)
    a(:, nx + 1) = a(:, nx)
    ierr = mpi_sendrecv(a(:, 1), ny, double_precision, left, 0, a(:, nx + 1), ny, double_precision, right, 0, comm, status)
    ierr = mpi_sendrecv(a(:, nx), ny, double_precision, right, 1, a(:, 0), ny, double_precision, left, 1, comm, status)
  end subroutine

  subroutine step(nx, ny, k, wall, v, u)
    integer(c_int), intent(in) :: nx, ny
    real(c_double), intent(in) :: k(ny, 0:nx + 1), wall(nx), v(ny, 0:nx + 1)
    real(c_double), intent(out) :: u(ny, nx)
    integer :: i, j
    do i = 1, nx
      do j = 1, ny
        u(j, i) = v(j, i) + flux(k(j, i), k(j, i - 1), v(j, i), v(j, i - 1)) + flux(k(j, i), k(j, i + 1), v(j, i), v(j, i + 1))
        if (j > 1) u(j, i) = u(j, i) + flux(k(j, i), k(j - 1, i), v(j, i), v(j - 1, i))
        if (j < ny) u(j, i) = u(j, i) + flux(k(j, i), k(j + 1, i), v(j, i), v(j + 1, i))
      end do
      ! Half a cell from the sides below and above.
      u(1, i) = u(1, i) - 2*k(1, i)*v(1, i)
      u(ny, i) = u(ny, i) + 2*k(ny, i)*(wall(i) - v(ny, i))
    end do
  end subroutine

  ! The heat that flows into a cell with conductivity ka and temperature va from its neighbor.
  pure real(c_double) function flux(ka, kb, va, vb)
    real(c_double), intent(in) :: ka, kb, va, vb
    flux = (ka + kb)/2*(vb - va)
  end function

  ! Replace the cotangent w of a step's result by that of its state v. The flux from b into a is the opposite of that from a
  ! into b, so a cell needs the cotangents of its neighbors, which are exchanged as the states are.
  subroutine step_b(nx, ny, k, kb, wall, wallb, v, w)
    integer(c_int), intent(in) :: nx, ny
    real(c_double), intent(in) :: k(ny, 0:nx + 1), wall(nx), v(ny, 0:nx + 1)
    real(c_double), intent(inout) :: kb(ny, nx), wallb(nx), w(ny, 0:nx + 1)
    real(c_double) :: vb(ny, nx)
    integer :: i, j
    vb = w(:, 1:nx)
    do i = 1, nx
      do j = 1, ny
        call flux_b(k(j, i), k(j, i - 1), v(j, i), v(j, i - 1), w(j, i) - w(j, i - 1), kb(j, i), vb(j, i))
        call flux_b(k(j, i), k(j, i + 1), v(j, i), v(j, i + 1), w(j, i) - w(j, i + 1), kb(j, i), vb(j, i))
        if (j > 1) call flux_b(k(j, i), k(j - 1, i), v(j, i), v(j - 1, i), w(j, i) - w(j - 1, i), kb(j, i), vb(j, i))
        if (j < ny) call flux_b(k(j, i), k(j + 1, i), v(j, i), v(j + 1, i), w(j, i) - w(j + 1, i), kb(j, i), vb(j, i))
      end do
      vb(1, i) = vb(1, i) - 2*k(1, i)*w(1, i)
      kb(1, i) = kb(1, i) - 2*v(1, i)*w(1, i)
      vb(ny, i) = vb(ny, i) - 2*k(ny, i)*w(ny, i)
      kb(ny, i) = kb(ny, i) + 2*(wall(i) - v(ny, i))*w(ny, i)
      wallb(i) = wallb(i) + 2*k(ny, i)*w(ny, i)
    end do
    w(:, 1:nx) = vb
  end subroutine

  pure subroutine flux_b(ka, kb, va, vb, fluxb, kab, vab)
    real(c_double), intent(in) :: ka, kb, va, vb, fluxb
    real(c_double), intent(inout) :: kab, vab
    kab = kab + fluxb*(vb - va)/2
    vab = vab - fluxb*(ka + kb)/2
  end subroutine
end module
