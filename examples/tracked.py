# torchrun --nproc-per-node=2 tracked.py train.py --lr 0.1
import runpy
import sys

from flyteplugins_tracking import tracking_init


@tracking_init(project="llm")
def main() -> None:
    sys.argv = sys.argv[1:]  # as the script expects it
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
