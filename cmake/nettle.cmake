# SHA-256. Linked statically: the plug-in must not pull a crypto library into the program that loads it.
find_path(NETTLE_INCLUDE nettle/sha2.h REQUIRED)
find_library(NETTLE_LIBRARY NAMES libnettle.a nettle REQUIRED)
# Imported, so that the installed package names it instead of exporting it (cmake/oscarConfig.cmake.in defines the same target).
add_library(oscar::nettle INTERFACE IMPORTED GLOBAL)
set_target_properties(oscar::nettle PROPERTIES INTERFACE_LINK_LIBRARIES "${NETTLE_LIBRARY}"
                                               INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${NETTLE_INCLUDE}")
