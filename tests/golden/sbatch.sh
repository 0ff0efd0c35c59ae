#!/bin/bash
#SBATCH --account=proj42
#SBATCH --comment='it'"'"'s "a" 100 % Käse'
#SBATCH --cpus-per-task=6
#SBATCH --exclusive
#SBATCH --job-name=harness-tr_in_me
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=job-%j.log
#SBATCH --partition=gpu
#SBATCH --time=25

# setup
module load cuda/12.4

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=6 --kill-on-bad-exit=1 '/opt/my py/bin/python' -P -u -m submitit.core._submit '/shared/me/.harness/a b'"'"'c/slurm'
