# make demo: distil the digits teacher and look at the result.  make test: the whole test suite.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ON_CPU = $$($(BIN)/python -c "import torch; print('' if torch.accelerator.is_available() else 'DS_ACCELERATOR=cpu')")

.PHONY: install demo test

install: $(VENV)/installed

$(VENV)/installed: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	touch $@

demo: install
	export PATH="$(abspath $(BIN)):$$PATH" $(ON_CPU) && \
	deepspeed --num_accelerators 1 train_pdd.py --ds_config ds_configs/zero3.json && \
	python sample_pdd.py --steps 1 2 4 8 --compare

test: install
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -q -n 2 --dist loadfile --durations 10 tests
