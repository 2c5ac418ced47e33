# What `cmake --install` and the Python wheel hold: the tool, the op library, and the package that find_package(tsmem) reads.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# The torch that the library was built for; the Python package compares it before it loads the library.
file(STRINGS ${TSMEM_TORCH}/version.py _version REGEX "^__version__")
string(REGEX REPLACE ".*'([^']+)'.*" "\\1" TSMEM_TORCH_VERSION "${_version}")
file(WRITE ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/libtsmem_ops.torch "${TSMEM_TORCH_VERSION}\n")

if(SKBUILD)  # site-packages/tsmem, beside torch and highspy
  set(_bin bin)
  set(_lib .)
  set(_cmake share/cmake/tsmem)
  set(_torch_from_lib "$ORIGIN/../torch/lib")
  set(_others_from_bin "$ORIGIN/../../torch/lib;$ORIGIN/../../highspy")
  set(TSMEM_INSTALLED_TORCH "\${CMAKE_CURRENT_LIST_DIR}/../../../../torch")
else()
  set(_bin ${CMAKE_INSTALL_BINDIR})
  set(_lib ${CMAKE_INSTALL_LIBDIR})
  set(_cmake ${CMAKE_INSTALL_LIBDIR}/cmake/tsmem)
  set(_torch_from_lib "${TSMEM_TORCH}/lib")
  set(_others_from_bin "${TSMEM_TORCH}/lib;${TSMEM_HIGHS_DIR}")
  set(TSMEM_INSTALLED_TORCH "${TSMEM_TORCH}")
endif()

set_target_properties(tsmem_ops PROPERTIES INSTALL_RPATH "${_torch_from_lib}")
install(TARGETS tsmem_ops EXPORT tsmemTargets LIBRARY DESTINATION ${_lib})
if(TARGET tsmem_ops_cuda)
  set_target_properties(tsmem_ops_cuda PROPERTIES INSTALL_RPATH "${_torch_from_lib}")
  install(TARGETS tsmem_ops_cuda LIBRARY DESTINATION ${_lib})
endif()
install(FILES ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/libtsmem_ops.torch DESTINATION ${_lib})
if(TARGET tsmem)
  file(RELATIVE_PATH _lib_from_bin /x/${_bin} /x/${_lib})
  set_target_properties(tsmem PROPERTIES INSTALL_RPATH "$ORIGIN/${_lib_from_bin};${_others_from_bin}")
  install(TARGETS tsmem RUNTIME DESTINATION ${_bin})
  install(TARGETS tsmem_no_python LIBRARY DESTINATION ${_lib})
endif()

install(EXPORT tsmemTargets NAMESPACE tsmem:: DESTINATION ${_cmake})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tsmemConfig.cmake.in ${CMAKE_BINARY_DIR}/tsmemConfig.cmake INSTALL_DESTINATION ${_cmake})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/tsmemConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/tsmemConfig.cmake ${CMAKE_BINARY_DIR}/tsmemConfigVersion.cmake ${PROJECT_SOURCE_DIR}/cmake/TsmemTorch.cmake
        DESTINATION ${_cmake})
