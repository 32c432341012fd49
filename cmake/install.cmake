include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
install(TARGETS oscar EXPORT oscarTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/oscar DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
