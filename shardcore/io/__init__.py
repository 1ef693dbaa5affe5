"""Files: each is read strictly, and written under a temporary name and then renamed.

schema, envelope, writing    strict reading, the schema and digest of each JSON file, and writing
files, towers                problems, pools, plans, also of sharding groups, and towers
model_files                  folders of models and policies, and sealed tensors
measurements                 samples
dataset, dataset_parts       samples of ops and collectives in a folder that only grows
replays                      replayed steps of a problem's plans
hot_ids, row_counts          hot ids of tables, and lookups of each row
dlrm_datasets                files of facebookresearch/dlrm_datasets
kineto                       traces of torch.profiler
job_folder, traced_*         traced jobs, and the samples of their steps
"""
