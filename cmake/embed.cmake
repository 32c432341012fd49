# Text files as string constants of one C++ source: cmake -D OUTPUT=x.cpp -D NAMES=a,b -D FILES=a.css,b.js -P embed.cmake
# declares `const std::string_view oscar::cli::embedded_a`, ... A line that points to a source map is left out.
string(REPLACE "," ";" NAMES "${NAMES}")
string(REPLACE "," ";" FILES "${FILES}")
set(out "#include <string_view>\nnamespace oscar::cli {\n")
foreach(name file IN ZIP_LISTS NAMES FILES)
  file(READ ${file} text)
  string(REGEX REPLACE "\n//# sourceMappingURL=[^\n]*" "" text "${text}")
  string(APPEND out "extern const std::string_view embedded_${name};\nconst std::string_view embedded_${name} = R\"embedded(${text})embedded\";\n")
endforeach()
string(APPEND out "}\n")
file(WRITE ${OUTPUT} "${out}")
