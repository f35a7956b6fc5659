"""Why a candidate differs: causes, from traces and from the files of the checkpoint."""
