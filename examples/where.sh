# Where each process of train.py is, on this node, with its rank.
# The brackets keep pgrep from finding a command that has this pattern.
for pid in $(pgrep -f "python.*[t]rain.py"); do
    tr '\0' '\n' < "/proc/$pid/environ" | grep -E '^(RANK|SLURM_PROCID)='
    py-spy dump --pid "$pid"
done
