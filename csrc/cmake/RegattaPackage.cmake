# What both libraries are installed by: regatta_install(NAME HEADER...). NAME is the target, its
# component of find_package(Regatta), and regatta_NAME.pc.in beside its CMakeLists.txt.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(REGATTA_PACKAGE_FILES ${CMAKE_CURRENT_LIST_DIR})

function(regatta_install name)
  set(package ${CMAKE_INSTALL_LIBDIR}/cmake/Regatta)
  install(TARGETS ${name} EXPORT Regatta-${name} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(FILES ${ARGN} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT Regatta-${name} NAMESPACE Regatta:: DESTINATION ${package})
  configure_package_config_file(
    ${REGATTA_PACKAGE_FILES}/RegattaConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/RegattaConfig.cmake
    INSTALL_DESTINATION ${package})
  write_basic_package_version_file(
    ${CMAKE_CURRENT_BINARY_DIR}/RegattaConfigVersion.cmake VERSION ${PROJECT_VERSION}
    COMPATIBILITY SameMajorVersion)
  configure_file(regatta_${name}.pc.in ${CMAKE_CURRENT_BINARY_DIR}/regatta_${name}.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/RegattaConfig.cmake
                ${CMAKE_CURRENT_BINARY_DIR}/RegattaConfigVersion.cmake DESTINATION ${package})
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/regatta_${name}.pc
          DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endfunction()
