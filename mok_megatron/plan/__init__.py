"""What a training run will cost, before it runs: `python -m mok_megatron.plan CONFIG`.

    model.py     a config file -> the model in numbers: parameters, stages of the pipeline
    layer.py     one MoE layer on one rank: FLOPs, bytes of memory and wire, workspace, context
    machines.py  GPUs in numbers, each with where it comes from: measured, datasheet, ...
    estimate.py  a layer on a machine: floors, what the measured products make of them, a step
    training.py  an iteration of the whole run: pipeline bubble, reduction, optimizer
    chart.py     step time against expert parallel size, and what an iteration is made of, as a PNG
    __main__.py  the command

Nothing here needs a GPU, torch or Megatron. What it says of several GPUs is a model: none has been
measured.
"""
