# SHA-256. Linked statically: the plug-in must not pull a crypto library into the program that loads it.
find_path(NETTLE_INCLUDE nettle/sha2.h REQUIRED)
find_library(NETTLE_LIBRARY NAMES libnettle.a nettle REQUIRED)
add_library(oscar_nettle INTERFACE)
add_library(oscar::nettle ALIAS oscar_nettle)
target_include_directories(oscar_nettle SYSTEM INTERFACE ${NETTLE_INCLUDE})
target_link_libraries(oscar_nettle INTERFACE ${NETTLE_LIBRARY})
