BEGIN TRANSACTION;
CREATE TABLE attempts (
    job TEXT NOT NULL, number INTEGER NOT NULL,
    zone TEXT, accelerator TEXT, started REAL NOT NULL, running REAL, ended REAL,
    outcome TEXT, detail TEXT NOT NULL DEFAULT '', hosts TEXT NOT NULL DEFAULT '[]',
    course TEXT,
    PRIMARY KEY (job, number)
) STRICT;
INSERT INTO "attempts" VALUES('000001',1,'us-central2-b','v4-16',1800000000.0,1800000000.06,1800000030.1,'succeeded','','[{"index": 0, "phase": "EXITED", "exit_code": 0, "error": "", "error_at": 1800000030.1, "tail": [], "detail": ""}, {"index": 1, "phase": "EXITED", "exit_code": 0, "error": "", "error_at": 1800000030.1, "tail": [], "detail": ""}]','{"step":3.0,"stepped_at":1800000020.1,"moving":true,"total":null,"resumed":null,"checkpoint":null,"saved_at":null,"tells_checkpoints":false}');
INSERT INTO "attempts" VALUES('000002',1,'us-central2-b','v4-16',1.80000003019999980927e+09,1.80000004215999794006e+09,1.80000004415999794006e+09,'program failed','program failed on host 0 of 2: train.py:7  ValueError: no','[{"index": 0, "phase": "EXITED", "exit_code": -15, "error": "", "error_at": 1800000044.139998, "tail": [], "detail": ""}, {"index": 1, "phase": "EXITED", "exit_code": -15, "error": "", "error_at": 1800000044.139998, "tail": [], "detail": ""}]',NULL);
INSERT INTO "attempts" VALUES('000003',1,'us-central2-b','v4-16',1.80000004419999790192e+09,1.80000004617999792099e+09,1.80000004621999788284e+09,'cancelled','','[{"index": 0, "phase": "EXITED", "exit_code": -15, "error": "", "error_at": 1800000046.199998, "tail": [], "detail": ""}, {"index": 1, "phase": "EXITED", "exit_code": -15, "error": "", "error_at": 1800000046.199998, "tail": [], "detail": ""}]',NULL);
INSERT INTO "attempts" VALUES('000004',1,'us-central2-b','v4-16',1.80000004629998445511e+09,1.80000004817999792099e+09,NULL,NULL,'','[]','{"step":7.0,"stepped_at":1800000048.1999826,"moving":false,"total":null,"resumed":null,"checkpoint":null,"saved_at":null,"tells_checkpoints":false}');
INSERT INTO "attempts" VALUES('000005',1,'us-central2-b','v4-16',1.80000007819998264313e+09,NULL,NULL,NULL,'','[]',NULL);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL
) STRICT;
INSERT INTO "events" VALUES(1,'000001',1.79476300697187757492e+09,'created','done');
INSERT INTO "events" VALUES(2,'000001',1800000000.0,'asked','v4-16 in us-central2-b');
INSERT INTO "events" VALUES(3,'000001',1800000000.04,'slice','2 hosts, 8 chips in us-central2-b');
INSERT INTO "events" VALUES(4,'000001',1800000000.06,'run','python train.py');
INSERT INTO "events" VALUES(5,'000001',1800000030.1,'succeeded','');
INSERT INTO "events" VALUES(6,'000002',1.79476300701429176331e+09,'created','failed');
INSERT INTO "events" VALUES(7,'000002',1.80000003019999980927e+09,'asked','v4-16 in us-central2-b');
INSERT INTO "events" VALUES(8,'000002',1.80000004213999795914e+09,'slice','2 hosts, 8 chips in us-central2-b');
INSERT INTO "events" VALUES(9,'000002',1.80000004215999794006e+09,'run','python train.py');
INSERT INTO "events" VALUES(10,'000002',1.80000004415999794006e+09,'failed','program failed on host 0 of 2: train.py:7  ValueError: no');
INSERT INTO "events" VALUES(11,'000002',1.80000004415999794006e+09,'failed','1 failure of the program; program failed on host 0 of 2: train.py:7  ValueError: no');
INSERT INTO "events" VALUES(12,'000003',1.79476300709700369835e+09,'created','kept');
INSERT INTO "events" VALUES(13,'000003',1.80000004419999790192e+09,'asked','v4-16 in us-central2-b');
INSERT INTO "events" VALUES(14,'000003',1.80000004615999794006e+09,'slice','2 hosts, 8 chips in us-central2-b');
INSERT INTO "events" VALUES(15,'000003',1.80000004617999792099e+09,'run','python train.py');
INSERT INTO "events" VALUES(16,'000003',1.80000004619998455048e+09,'note','cancel asked for');
INSERT INTO "events" VALUES(17,'000003',1.80000004621999788284e+09,'cancelled','slice v4-16 in us-central2-b kept for a resume');
INSERT INTO "events" VALUES(18,'000004',1.79476300714167118073e+09,'created','runs');
INSERT INTO "events" VALUES(19,'000004',1.80000004629998445511e+09,'asked','v4-16 in us-central2-b');
INSERT INTO "events" VALUES(20,'000004',1.80000004815999794006e+09,'slice','2 hosts, 8 chips in us-central2-b');
INSERT INTO "events" VALUES(21,'000004',1.80000004817999792099e+09,'run','python train.py');
INSERT INTO "events" VALUES(22,'000005',1.7947630071692276001e+09,'created','waits');
INSERT INTO "events" VALUES(23,'000005',1.80000007819998264313e+09,'asked','v4-16 in us-central2-b');
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    user TEXT NOT NULL, name TEXT NOT NULL, spec TEXT NOT NULL, state TEXT NOT NULL,
    progress TEXT
) STRICT;
INSERT INTO "jobs" VALUES(1,'lab','done','{"name": "done", "accelerator": ["v4-16"], "zones": ["us-central2-b"], "capacity": "spot", "workdir": null, "setup": null, "environment": {}, "secrets": [], "python": {"kind": "system", "version": null, "requirements": null, "image": null}, "mounts": {}, "run": "python train.py", "hosts": "all", "checkpoint": null, "retry": {"failures": 3, "bad_hosts": 10, "preemptions": "unlimited"}, "project": null, "allow_cross_region": false, "stop_grace": 30.0, "progress": null, "stuck_after": 1800.0, "archive": null}','{"id":"000001","owner":"1239a6cb","choices":[["v4-16","us-central2-b"]],"created_at":1794763006.9718776,"allowance":{"failures":3,"bad_hosts":10,"preemptions":null},"grace":30.0,"stuck_after":1800.0,"wish":"run","status":"SUCCEEDED","reason":"","next_choice":0,"asks":1,"attempts":1,"failures":0,"bad_hosts":0,"preemptions":0,"departures":0,"not_before":0.0,"has_run":true,"has_stepped":true,"attempt":null,"slice":null,"cause":null,"ended_at":1800000030.1}','{"step": 3, "loss": 0.3333333333333333}');
INSERT INTO "jobs" VALUES(2,'lab','failed','{"name": "failed", "accelerator": ["v4-16"], "zones": ["us-central2-b"], "capacity": "spot", "workdir": null, "setup": null, "environment": {}, "secrets": [], "python": {"kind": "system", "version": null, "requirements": null, "image": null}, "mounts": {}, "run": "python train.py", "hosts": "all", "checkpoint": null, "retry": {"failures": 0, "bad_hosts": 10, "preemptions": "unlimited"}, "project": null, "allow_cross_region": false, "stop_grace": 30.0, "progress": null, "stuck_after": 1800.0, "archive": null}','{"id":"000002","owner":"1239a6cb","choices":[["v4-16","us-central2-b"]],"created_at":1794763007.0142918,"allowance":{"failures":0,"bad_hosts":10,"preemptions":null},"grace":30.0,"stuck_after":1800.0,"wish":"run","status":"FAILED","reason":"1 failure of the program; program failed on host 0 of 2: train.py:7  ValueError: no","next_choice":0,"asks":1,"attempts":1,"failures":1,"bad_hosts":0,"preemptions":0,"departures":0,"not_before":0.0,"has_run":true,"has_stepped":false,"attempt":null,"slice":null,"cause":{"kind":"program failed","host":0,"hosts":2,"error":"train.py:7  ValueError: no","tail":[],"ahead_seconds":0.0},"ended_at":1800000044.159998}',NULL);
INSERT INTO "jobs" VALUES(3,'lab','kept','{"name": "kept", "accelerator": ["v4-16"], "zones": ["us-central2-b"], "capacity": "spot", "workdir": null, "setup": null, "environment": {}, "secrets": [], "python": {"kind": "system", "version": null, "requirements": null, "image": null}, "mounts": {}, "run": "python train.py", "hosts": "all", "checkpoint": null, "retry": {"failures": 3, "bad_hosts": 10, "preemptions": "unlimited"}, "project": null, "allow_cross_region": false, "stop_grace": 30.0, "progress": null, "stuck_after": 1800.0, "archive": null}','{"id":"000003","owner":"1239a6cb","choices":[["v4-16","us-central2-b"]],"created_at":1794763007.0970037,"allowance":{"failures":3,"bad_hosts":10,"preemptions":null},"grace":30.0,"stuck_after":1800.0,"wish":"cancel","status":"CANCELLED","reason":"slice v4-16 in us-central2-b kept for a resume","next_choice":0,"asks":1,"attempts":1,"failures":0,"bad_hosts":0,"preemptions":0,"departures":0,"not_before":0.0,"has_run":true,"has_stepped":false,"attempt":null,"slice":{"name":"dl-1239a6cb-000003-1","zone":"us-central2-b","accelerator":"v4-16","hosts":2,"asked_at":1800000044.199998,"phase":"ready","ready_at":1800000046.159998},"cause":null,"ended_at":1800000046.219998}',NULL);
INSERT INTO "jobs" VALUES(4,'lab','runs','{"name": "runs", "accelerator": ["v4-16"], "zones": ["us-central2-b"], "capacity": "spot", "workdir": null, "setup": null, "environment": {}, "secrets": [], "python": {"kind": "system", "version": null, "requirements": null, "image": null}, "mounts": {}, "run": "python train.py", "hosts": "all", "checkpoint": null, "retry": {"failures": 3, "bad_hosts": 10, "preemptions": "unlimited"}, "project": null, "allow_cross_region": false, "stop_grace": 30.0, "progress": null, "stuck_after": 1800.0, "archive": null}','{"id":"000004","owner":"1239a6cb","choices":[["v4-16","us-central2-b"]],"created_at":1794763007.1416712,"allowance":{"failures":3,"bad_hosts":10,"preemptions":null},"grace":30.0,"stuck_after":1800.0,"wish":"run","status":"RUNNING","reason":"","next_choice":0,"asks":1,"attempts":1,"failures":0,"bad_hosts":0,"preemptions":0,"departures":0,"not_before":0.0,"has_run":true,"has_stepped":true,"attempt":{"number":1,"started_at":1800000046.2999845,"running_at":1800000048.179998,"failed_at":null,"stuck_at":null,"stopping":false},"slice":{"name":"dl-1239a6cb-000004-1","zone":"us-central2-b","accelerator":"v4-16","hosts":2,"asked_at":1800000046.2999845,"phase":"ready","ready_at":1800000048.159998},"cause":null,"ended_at":null}','{"step": 7, "loss": 0.5}');
INSERT INTO "jobs" VALUES(5,'lab','waits','{"name": "waits", "accelerator": ["v4-16"], "zones": ["us-central2-b"], "capacity": "spot", "workdir": null, "setup": null, "environment": {}, "secrets": [], "python": {"kind": "system", "version": null, "requirements": null, "image": null}, "mounts": {}, "run": "python train.py", "hosts": "all", "checkpoint": null, "retry": {"failures": 3, "bad_hosts": 10, "preemptions": "unlimited"}, "project": null, "allow_cross_region": false, "stop_grace": 30.0, "progress": null, "stuck_after": 1800.0, "archive": null}','{"id":"000005","owner":"1239a6cb","choices":[["v4-16","us-central2-b"]],"created_at":1794763007.1692276,"allowance":{"failures":3,"bad_hosts":10,"preemptions":null},"grace":30.0,"stuck_after":1800.0,"wish":"run","status":"WAITING","reason":"asking for v4-16 in us-central2-b","next_choice":0,"asks":1,"attempts":1,"failures":0,"bad_hosts":0,"preemptions":0,"departures":0,"not_before":0.0,"has_run":false,"has_stepped":false,"attempt":{"number":1,"started_at":1800000078.1999826,"running_at":null,"failed_at":null,"stuck_at":null,"stopping":false},"slice":{"name":"dl-1239a6cb-000005-1","zone":"us-central2-b","accelerator":"v4-16","hosts":2,"asked_at":1800000078.1999826,"phase":"waiting","ready_at":null},"cause":null,"ended_at":null}',NULL);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
INSERT INTO "meta" VALUES('owner','1239a6cb');
CREATE TABLE points (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, attempt INTEGER NOT NULL,
    time REAL NOT NULL, step REAL NOT NULL, metrics TEXT NOT NULL
) STRICT;
INSERT INTO "points" VALUES(1,'000001',1,1800000000.1,1.0,'{"loss": 1.0}');
INSERT INTO "points" VALUES(2,'000001',1,1800000010.1,2.0,'{"loss": 0.5}');
INSERT INTO "points" VALUES(3,'000001',1,1800000020.1,3.0,'{"loss": 0.3333333333333333}');
INSERT INTO "points" VALUES(4,'000004',1,1.80000004819998264313e+09,7.0,'{"loss": 0.5}');
CREATE TABLE slices (
    name TEXT PRIMARY KEY, job TEXT NOT NULL, zone TEXT NOT NULL, accelerator TEXT NOT NULL,
    asked REAL NOT NULL, ready REAL, released REAL, gone REAL
) STRICT;
INSERT INTO "slices" VALUES('dl-1239a6cb-000001-1','000001','us-central2-b','v4-16',1800000000.0,1800000000.04,1800000030.1,1.80000003013999986649e+09);
INSERT INTO "slices" VALUES('dl-1239a6cb-000002-1','000002','us-central2-b','v4-16',1.80000003019999980927e+09,1.80000004213999795914e+09,1.80000004415999794006e+09,1.80000004615999794006e+09);
INSERT INTO "slices" VALUES('dl-1239a6cb-000003-1','000003','us-central2-b','v4-16',1.80000004419999790192e+09,1.80000004615999794006e+09,NULL,NULL);
INSERT INTO "slices" VALUES('dl-1239a6cb-000004-1','000004','us-central2-b','v4-16',1.80000004629998445511e+09,1.80000004815999794006e+09,NULL,NULL);
INSERT INTO "slices" VALUES('dl-1239a6cb-000005-1','000005','us-central2-b','v4-16',1.80000007819998264313e+09,NULL,NULL,NULL);
CREATE INDEX points_of_job ON points (job, id);
CREATE INDEX events_of_job ON events (job, id);
CREATE INDEX slices_of_job ON slices (job);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',5);
INSERT INTO "sqlite_sequence" VALUES('events',23);
COMMIT;
