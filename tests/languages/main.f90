program main
  use, intrinsic :: iso_c_binding, only: c_char, c_int, c_null_char
  implicit none
  interface
    function train(file, trained) result(failed) bind(c)
      import :: c_char, c_int
      character(kind=c_char), intent(in) :: file(*), trained(*)
      integer(c_int) :: failed
    end function train
  end interface
  character(1000) :: file, trained

  call get_command_argument(1, file)
  call get_command_argument(2, trained)
  if (train(trim(file)//c_null_char, trim(trained)//c_null_char) /= 0) stop 1
end program main
