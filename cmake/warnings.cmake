# Warnings (and sanitizers) of everything we compile ourselves.
add_library(oscar_warnings INTERFACE)
add_library(oscar::warnings ALIAS oscar_warnings)
target_compile_options(oscar_warnings INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion
                                                -Wnon-virtual-dtor -Wold-style-cast -Wcast-align -Woverloaded-virtual)
if(OSCAR_WERROR)
  target_compile_options(oscar_warnings INTERFACE -Werror)
endif()
if(OSCAR_SANITIZE)
  add_compile_options(-fsanitize=${OSCAR_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${OSCAR_SANITIZE})
endif()
