# Two commands on a fresh Debian 12 machine; scripts/ does the work, CMake builds.
MODEL ?= smollm2

help:
	@echo 'make demo [MODEL=smollm2|qwen0.5b|qwen1.5b|gemma270m]   set everything up, then answer a question from a 2-bit cache'
	@echo 'make eval [MODEL=...] [QUICK=1|FULL=1|FRESH=1|LONG=1]   set everything up, then measure what each codec costs in quality'
	@echo 'make table                                             the same in full, on F16 weights, for all models, as one table'
	@echo 'make zoo [MODEL=...]                                    set everything up, then make the artifacts and cards of docs/zoo again'
	@echo 'make bench [MODEL=...] [QUICK=1]                         set everything up, then measure speed beside stock llama.cpp: build/bench.json'
	@echo 'make test                                              set everything up, then run all tests'
	@echo 'make build                                             build the library, the plug-in and the oscar command'
	@echo 'make clean                                             remove build/ (the cache directory stays)'

demo:
	scripts/setup demo '$(MODEL)'
	scripts/build release -DOSCAR_TESTS=OFF
	python3 scripts/demo.py '$(MODEL)'

eval: SIZE = $(if $(QUICK),quick) $(if $(FULL),full) $(if $(FRESH),fresh) $(if $(LONG),long)
eval:
	@case '$(words $(SIZE))' in 0|1) ;; *) echo 'oscar: QUICK, FULL, FRESH and LONG exclude each other' >&2; exit 2;; esac
	scripts/setup $(if $(FRESH),fresh,demo) '$(MODEL)'
	scripts/build release -DOSCAR_TESTS=OFF
	python3 scripts/eval.py '$(MODEL)' $(SIZE)

table:
	for model in smollm2 qwen0.5b qwen1.5b gemma270m; do scripts/setup demo $$model || exit 1; done
	scripts/build release -DOSCAR_TESTS=OFF
	python3 scripts/quality_table.py

zoo: MODEL = smollm2 qwen0.5b qwen1.5b gemma270m
zoo:
	for model in $(MODEL); do scripts/setup demo $$model || exit 1; done
	scripts/build release -DOSCAR_TESTS=OFF
	python3 scripts/zoo.py $(MODEL)

bench:
	scripts/setup bench '$(MODEL)'
	scripts/build release -DOSCAR_TESTS=OFF
	python3 scripts/bench.py '$(MODEL)' $(if $(QUICK),quick)

test:
	scripts/setup test
	scripts/test

build:
	scripts/setup build
	scripts/build release -DOSCAR_TESTS=OFF

clean:
	rm -rf build

.PHONY: help demo eval table zoo bench test build clean
