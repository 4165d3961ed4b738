# Two commands do everything: `make compare` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch's CPU wheel brings no Triton. It is kept beside the packages of .venv, and seen only where it interprets, since
# torch.compile's tests must not find it. Where there is no wheel of it, those tests are skipped and say so.
TRITON := $(if $(filter Linux,$(shell uname -s)),$(VENV)/triton/.installed)
INTERPRET := PYTHONPATH=$(VENV)/triton TRITON_INTERPRET=1 OMP_NUM_THREADS=1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: compare test test-long venv lint unit triton clean
compare: venv
	$(BIN)/attnscope compare

test: lint unit

lint: venv
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
# One thread a process and a process a core: small tensors gain nothing from more. What measures time runs alone.
unit: venv $(TRITON)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu and not serial and not long" -n logical --dist worksteal
	$(BIN)/pytest -m "serial and not gpu"
	$(INTERPRET) $(BIN)/pytest -m "not gpu" -n logical -k random_workloads tests/test_triton_fused_interpreted.py

test-long: venv
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "long and not gpu" -n logical

# triton_fused and hopper's decoding in Triton's interpreter and in its compiler, without a GPU: what takes too long for
# `make test`.
triton: venv $(TRITON)
	$(INTERPRET) $(BIN)/pytest -m "not gpu and not slow" -n logical \
		-k "(triton_fused or hopper) and not implementation_on_workload" \
		tests/test_contract.py tests/test_triton_fused_interpreted.py tests/test_hopper_decode_interpreted.py
	PYTHONPATH=$(VENV)/triton OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu" -n logical \
		tests/test_triton_fused.py tests/test_hopper_decode.py

$(VENV)/triton/.installed: constraints.txt | venv
	rm -rf $(@D)
	$(BIN)/pip install -q --no-deps --no-compile -c constraints.txt --target $(@D) triton
	touch $@

venv: $(VENV)/.installed
# Built anew when what it is built from changed; otherwise this does nothing.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("attnscope needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[torch,report,dev]'
	@# on every core, where pip would take one, and only what each process imports, the command line's packages and the
	@# large part of torch: the rest may wait until it is asked for, and most of it never is
	$(BIN)/python -m compileall -q -j 0 -x '/tests/|/testing/_internal/' \
		$(foreach package,torch sympy numpy typer rich,$(VENV)/lib/python3*/site-packages/$(package)) >/dev/null 2>&1 || true
	touch $@

clean:
	rm -rf $(VENV) build dist attnscope-out
