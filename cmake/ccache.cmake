# Objects are shared by all build trees and checkouts of a machine when ccache is installed: paths are made relative to the
# checkout before they are hashed.
find_program(CCACHE_PROGRAM ccache)
get_filename_component(ccache_base ${CMAKE_CURRENT_LIST_DIR}/.. ABSOLUTE)  # of tests/neon, too, a project of its own
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${ccache_base} CCACHE_NOHASHDIR=1 ${CCACHE_PROGRAM})
endif()
