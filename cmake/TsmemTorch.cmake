# tsmem::torch: torch_cpu and c10 of an installed torch package, as imported targets of our own, and TSMEM_TORCH_VERSION.
# find_package(Torch) is not used: it needs a CUDA toolkit where the wheel has CUDA, and leaks run paths.
if(NOT TSMEM_TORCH)
  file(GLOB _found ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
  if(_found)
    list(GET _found 0 TSMEM_TORCH)
  endif()
endif()
if(NOT EXISTS "${TSMEM_TORCH}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "No torch found at '${TSMEM_TORCH}'. Run 'make build', or set TSMEM_TORCH to …/site-packages/torch of an installed torch.")
endif()
file(REAL_PATH "${TSMEM_TORCH}" TSMEM_TORCH)
file(STRINGS "${TSMEM_TORCH}/version.py" _version REGEX "^__version__")
string(REGEX REPLACE ".*'([^']+)'.*" "\\1" TSMEM_TORCH_VERSION "${_version}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TSMEM_TORCH_MINOR "${TSMEM_TORCH_VERSION}")
message(STATUS "torch: ${TSMEM_TORCH_VERSION}, ${TSMEM_TORCH}")

add_library(tsmem_torch INTERFACE)
add_library(tsmem::torch ALIAS tsmem_torch)
target_include_directories(tsmem_torch SYSTEM INTERFACE ${TSMEM_TORCH}/include ${TSMEM_TORCH}/include/torch/csrc/api/include)
target_link_libraries(tsmem_torch INTERFACE ${TSMEM_TORCH}/lib/libtorch_cpu.so ${TSMEM_TORCH}/lib/libc10.so)
target_compile_definitions(tsmem_torch INTERFACE FMT_HEADER_ONLY=1)
# The headers of newer versions need it.
target_compile_features(tsmem_torch INTERFACE cxx_std_20)
# libtorch_cpu.so of the CUDA wheel needs CUDA's libraries, which it finds itself at run time.
target_link_options(tsmem_torch INTERFACE -Wl,--allow-shlib-undefined)
