# tsmem::headers: CLI11, nlohmann-json and dtl, which are headers alone. As they are installed (Debian's libcli11-dev, nlohmann-json3-dev, libdtl-dev), as
# an sdist brings them, or fetched with git by their commit, so that nothing else can come.
add_library(tsmem_headers INTERFACE)
add_library(tsmem::headers ALIAS tsmem_headers)

function(tsmem_git name repository)
  execute_process(COMMAND git ${ARGN} RESULT_VARIABLE failed OUTPUT_QUIET ERROR_VARIABLE why)
  if(failed)
    message(FATAL_ERROR "The headers of ${name} are not installed, and could not be fetched from ${repository}: install Debian's libcli11-dev, "
                        "nlohmann-json3-dev and libdtl-dev, or build from an sdist, which brings them. ${why}")
  endif()
endfunction()

function(tsmem_fetch name repository commit)
  set(folder ${CMAKE_BINARY_DIR}/third_party/${name})
  if(EXISTS ${folder}/.complete)
    return()
  endif()
  message(STATUS "fetching ${repository}")
  file(REMOVE_RECURSE ${folder})
  tsmem_git(${name} ${repository} init -q ${folder})
  tsmem_git(${name} ${repository} -C ${folder} fetch -q --depth 1 ${repository} ${commit})
  tsmem_git(${name} ${repository} -C ${folder} checkout -q ${commit})
  file(TOUCH ${folder}/.complete)
endfunction()

function(tsmem_headers header name repository commit below)
  find_path(path ${header} HINTS ${PROJECT_SOURCE_DIR}/third_party NO_CACHE)
  if(NOT path)
    tsmem_fetch(${name} ${repository} ${commit})
    set(path ${CMAKE_BINARY_DIR}/third_party/${name}/${below})
  endif()
  target_include_directories(tsmem_headers SYSTEM INTERFACE ${path})
endfunction()

tsmem_headers(CLI/CLI.hpp CLI11 https://github.com/CLIUtils/CLI11 70f8072f9dd2292fd0b9f9e5f58e279f60483ed3 include)
tsmem_headers(nlohmann/json.hpp json https://github.com/nlohmann/json bc889afb4c5bf1c0d8ee29ef35eaaf4c8bef8a5d include)
tsmem_headers(dtl/dtl.hpp dtl https://github.com/cubicdaiya/dtl cd45dd48089c6e9f7a595d920ddfb82c08d59150 .)
