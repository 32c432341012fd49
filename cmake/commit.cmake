# Run at every build: writes OUTPUT, a source file with the commit that SOURCE is at, when that has changed.
execute_process(COMMAND git describe --always --dirty --abbrev=7 --exclude=* WORKING_DIRECTORY ${SOURCE}
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  set(commit "")
endif()
set(text "namespace oscar::cli {\nextern const char* const kCommit;\nconst char* const kCommit = \"${commit}\";\n}  // namespace oscar::cli\n")
set(known "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} known)
endif()
if(NOT known STREQUAL text)
  file(WRITE ${OUTPUT} "${text}")
endif()
