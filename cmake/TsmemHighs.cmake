# tsmem::highs: the MILP solver HiGHS, as PyPI's highspy brings it (a shared library with a C interface), or a system's.
file(GLOB _highspy ${TSMEM_TORCH}/../highspy ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/highspy)
find_library(TSMEM_HIGHS NAMES libhighs.so.1 highs HINTS ${_highspy} NO_CACHE)
if(NOT EXISTS "${TSMEM_HIGHS}")
  message(FATAL_ERROR "libhighs.so.1 was not found: run 'make build', install PyPI's highspy 1.15.1 beside torch, or set TSMEM_HIGHS to the library.")
endif()
file(REAL_PATH "${TSMEM_HIGHS}" TSMEM_HIGHS)
get_filename_component(TSMEM_HIGHS_DIR "${TSMEM_HIGHS}" DIRECTORY)
message(STATUS "HiGHS: ${TSMEM_HIGHS}")

add_library(tsmem_highs INTERFACE)
add_library(tsmem::highs ALIAS tsmem_highs)
target_link_libraries(tsmem_highs INTERFACE ${TSMEM_HIGHS})
