! Trains a (rewritten) TorchScript file with FTorch for a few steps and saves it: nothing in here knows of tsmem.
!   train_fortran MODEL.pt TRAINED.pt PARAMETERS     the number of the model's parameters, which FTorch asks for
program train
  use, intrinsic :: iso_c_binding, only: c_int64_t
  use, intrinsic :: iso_fortran_env, only: real32
  use ftorch
  implicit none
  type(torch_model) :: model
  type(torch_tensor) :: images(1), outputs(1), wanted, loss
  type(torch_tensor), allocatable :: parameters(:)
  type(torch_optim) :: optimizer
  real(real32), target :: loss_value(1)
  character(1000) :: file, trained, count
  integer :: step, n

  call get_command_argument(1, file)
  call get_command_argument(2, trained)
  call get_command_argument(3, count)
  read (count, *) n

  call torch_model_load(model, file, torch_kCPU, is_training=.true.)
  allocate (parameters(n))
  call torch_model_parameters(model, parameters)
  call torch_optim_SGD(optimizer, parameters, learning_rate=0.01d0)

  call torch_tensor_ones(images(1), 4, [4_c_int64_t, 3_c_int64_t, 64_c_int64_t, 64_c_int64_t], torch_kFloat32, torch_kCPU)
  call torch_tensor_zeros(wanted, 2, [4_c_int64_t, 1000_c_int64_t], torch_kFloat32, torch_kCPU)
  call torch_tensor_empty(outputs(1), 2, [4_c_int64_t, 1000_c_int64_t], torch_kFloat32, torch_kCPU)
  do step = 0, 2
    call optimizer%zero_grad()
    call torch_model_forward(model, images, outputs, requires_grad=.true.)
    call torch_tensor_from_array(loss, loss_value, torch_kCPU)
    call torch_loss_mse(loss, outputs(1), wanted)
    call torch_tensor_backward(loss)
    call optimizer%step()
    print '(a,i0,a,f0.6)', 'step ', step, ' loss ', loss_value(1)
  end do
  call torch_model_save(model, trained)
end program train
