# `cmake --install`: the library with its headers and package (find_package(oscar), target oscar::oscar), the command, the plug-in;
# the CUDA kernels, where they were built, as component `cuda` (target oscar::cuda).
include(CMakePackageConfigHelpers)
set(OSCAR_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/oscar)

install(TARGETS oscar EXPORT oscarTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/oscar DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} PATTERN cuda EXCLUDE)
install(EXPORT oscarTargets NAMESPACE oscar:: DESTINATION ${OSCAR_PACKAGE_DIR})
if(OSCAR_CUDA)
  install(TARGETS oscar_cuda EXPORT oscarCudaTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(DIRECTORY include/oscar/cuda DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/oscar)
  install(EXPORT oscarCudaTargets NAMESPACE oscar:: DESTINATION ${OSCAR_PACKAGE_DIR})
endif()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/oscarConfig.cmake.in ${PROJECT_BINARY_DIR}/oscarConfig.cmake
                              INSTALL_DESTINATION ${OSCAR_PACKAGE_DIR})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/oscarConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/oscarConfig.cmake ${PROJECT_BINARY_DIR}/oscarConfigVersion.cmake DESTINATION ${OSCAR_PACKAGE_DIR})
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
