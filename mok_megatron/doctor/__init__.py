"""python -m mok_megatron.doctor: can this machine run mok, and if not, why and what to do.

    machine.py       the facts, gathered in one place into one record
    probes.py        facts for which torch or the driver must be touched, by processes that may die
    trial.py         a small layer, by a backend and by a dense float64 layer
    determinism.py   the same layer again and again, in processes of their own: the same bytes?
    merge.py         --merge: which rank of a failed run was first
    finding.py       what a check is, and what it finds
    software.py      checks of what is installed, and for which GPUs
    sharing.py       checks of containers, hosts and NVLink domains that lie between ranks
    surroundings.py  checks of links, memory, limits, variables, and the trials
    judge.py         which backend, and all findings
    __main__.py      the command

Nothing here imports Megatron, and nothing but what runs in a probe imports torch.
"""
