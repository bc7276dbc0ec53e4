"""Recorded responses of Google Cloud to people and tools, each with its source.

Names of projects and ids are shortened. `docs` are the error pages of Google Cloud. `form` is a
recorded text in the form of another generation, zone or service.
"""

import json
from datetime import UTC, datetime

import pytest

from drumline.cloud.google.errors import classify, explain
from drumline.cloud.google.permissions import PERMISSIONS, Permission, role_of
from drumline.cloud.google.responses import parse_answer, parse_error
from drumline.observed import Fault, FaultType, Scope

STOCKOUT = Fault(FaultType.STOCKOUT, Scope.ZONE)
ZONE_QUOTA = Fault(FaultType.QUOTA, Scope.ZONE)
REGION_QUOTA = Fault(FaultType.QUOTA, Scope.REGION)
RATE = Fault(FaultType.RATE, Scope.PROJECT)
ZONE_DENIED = Fault(FaultType.DENIED, Scope.ZONE)
PROJECT_DENIED = Fault(FaultType.DENIED, Scope.PROJECT)
POLICY = Fault(FaultType.DENIED, Scope.REQUEST)
LOGIN = Fault(FaultType.LOGIN, Scope.PROJECT)
PREEMPTED = Fault(FaultType.PREEMPTED, Scope.ZONE)
CONFLICT = Fault(FaultType.CONFLICT, Scope.REQUEST)
ZONE_INVALID = Fault(FaultType.INVALID, Scope.ZONE)
INVALID = Fault(FaultType.INVALID, Scope.REQUEST)
TRANSIENT = Fault(FaultType.TRANSIENT, Scope.REQUEST)
NOT_FOUND = Fault(FaultType.NOT_FOUND, Scope.REQUEST)

# source, gRPC code, text, fault
ANSWERS: tuple[tuple[str, int | None, str, Fault], ...] = (
    # --- Stockout
    ("skypilot", 8, 'There is no more capacity in the zone "europe-west4-a"; you can try in '
     "another zone where Cloud TPU Nodes are offered (see "
     "https://cloud.google.com/tpu/docs/regions) [EID: 0x1bc8f9d790be9142]", STOCKOUT),
    ("terraform", 8, 'There is no more capacity in the zone "us-central1-c"; you can queue your '
     "request to get capacity when available (see https://cloud.google.com/tpu/docs/"
     "queued-resources#request_a_preemptible_queued_resource) or try in another zone where Cloud "
     "TPU Nodes are offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0xc99]",
     STOCKOUT),
    ("skypilot", None, "No more capacity in this zone.", STOCKOUT),
    ("skypilot", 8, "Insufficient reserved capacity. Contact customer support to increase your "
     "reservation. [EID: 0x7adf6d58c08b0aa4]", STOCKOUT),
    ("skypilot", 9, "Insufficient reserved capacity. Contact customer support.", STOCKOUT),
    ("form", 8, "Insufficient capacity.", STOCKOUT),
    ("hawq", None, "The zone 'projects/p/zones/us-central1-a' does not have enough resources "
     "available to fulfill the request. Try a different zone, or try again later.", STOCKOUT),
    ("skypilot", 14, "ZONE_RESOURCE_POOL_EXHAUSTED", STOCKOUT),
    ("skypilot", 2, "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS: The zone does not have enough "
     "resources available to fulfill the request, '(resource type:compute)'.", STOCKOUT),
    ("dstack", None, "A n1-highmem-2 VM instance with 2 nvidia-tesla-t4 accelerator(s) is "
     "currently unavailable in the europe-west2-a zone. Consider trying your request in the "
     "europe-west2-c zone(s), which currently has capacity", STOCKOUT),
    ("gke", None, "Atomic resize failed with [GCE_STOCKOUT]", STOCKOUT),
    ("docs", 8, "insufficientCapacity: the required capacity is not available", STOCKOUT),
    ("gemma4", None, "reason: stockout", STOCKOUT),
    ("form", 8, "Not enough resources available in the zone to create the TPU.", STOCKOUT),
    ("form", 14, "The requested resources are currently unavailable in us-east5-b", STOCKOUT),
    ("form", 8, "Currently there is not enough capacity for v6e-64 in us-east5-a.", STOCKOUT),
    ("form", 8, "We do not have sufficient TPU capacity in the zone you requested", STOCKOUT),
    ("form", 8, "The zone is out of TPU capacity.", STOCKOUT),
    ("form", 8, "lack of capacity", STOCKOUT),
    # --- Quota of chips, addresses and disks
    ("marin", 8, "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. "
     "Limit: 0 in region us-east5.", REGION_QUOTA),
    ("sayouzone", 8, "Quota limit 'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' has been "
     "exceeded. Limit: 4 in zone us-east5-a. QuotaFailure: Quota "
     "'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' exhausted.", ZONE_QUOTA),
    ("gunay", 8, "Quota 'TPUV5sPreemptibleLitepodServingPerProjectPerZoneForTPUAPI' exhausted. "
     "Limit 4 in zone us-central1-a", ZONE_QUOTA),
    ("hao", 8, "Quota 'TPUV5PPerProjectPerRegionForTPUAPI' exhausted. Limit 8 in region "
     "us-central1", REGION_QUOTA),
    ("grpo", None, "Error: Quota limit 'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' ... "
     "Limit: 0", ZONE_QUOTA),
    ("sglang", None, "Quota limit 'TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI' has been "
     "exceeded", REGION_QUOTA),
    ("skypilot", 8, "Quota 'TPUV2sPreemptiblePodPerProjectPerRegionForTPUAPI' exhausted. Limit 32 "
     "in region europe-west4", REGION_QUOTA),
    ("gemma4", 7, "Quota 'TPUS_PER_TPU_FAMILY' exceeded. Limit: 0.0 in region us-east5.",
     REGION_QUOTA),
    ("form", 8, "Quota 'PREEMPTIBLE_TPU_LITE_PODSLICE_V5' exceeded. Limit: 16.0 in zone "
     "us-west4-a.", ZONE_QUOTA),
    ("form", 8, "Quota limit 'TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI' has been "
     "exceeded. Limit: 32 in zone us-west4-a. [RATE_LIMIT_EXCEEDED]", ZONE_QUOTA),
    ("form", 9, "You have reached the maximum number of queued resources (100) in this zone",
     REGION_QUOTA),
    ("docs", 8, "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8.0 in region us-central1.",
     REGION_QUOTA),
    ("fastai", None, "Quota 'GPUS_ALL_REGIONS' exceeded. Limit: 0.0 globally.", REGION_QUOTA),
    ("gke", None, "Code: QUOTA_EXCEEDED Message: Quota 'N2_CPUS' exceeded.", REGION_QUOTA),
    ("vertex", 8, "The following quota metrics exceed quota limits: "
     "aiplatform.googleapis.com/custom_model_training_tpu_v2", REGION_QUOTA),
    ("form", 8, "Insufficient TPU quota for the request", REGION_QUOTA),
    # --- The rate of calls
    ("marin", 8, "Maximum number of CreateNode requests per minute", RATE),
    ("kms", 8, "Quota exceeded for quota metric 'Write requests' and limit 'Write requests per "
     "minute' of service 'cloudkms.googleapis.com' for consumer 'project_number:1'.", RATE),
    ("skypilot", 7, "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute' of "
     "service 'compute.googleapis.com' for consumer 'project_number:1'.", RATE),
    ("form", 8, "Quota exceeded for quota metric 'Read requests' and limit "
     "'ReadRequestsPerMinutePerProject' of service 'tpu.googleapis.com'", RATE),
    ("form", 8, "Quota exceeded. [RATE_LIMIT_EXCEEDED CreateNodeRequestsPerMinutePerProject]",
     RATE),
    ("compute", 7, "Rate Limit Exceeded [rateLimitExceeded]", RATE),
    ("compute", 7, "User Rate Limit Exceeded [userRateLimitExceeded]", RATE),
    ("docs", 8, "Too Many Requests", RATE),
    ("proxy", 8, "HTTP 429", RATE),
    ("form", 8, "Quota exceeded: 1200 API requests per 100 seconds", RATE),
    # --- Preemption
    ("skypilot", 3, "Cloud TPU received a bad request. update is not supported while in state "
     "PREEMPTED [EID: 0x73013519f5b7feb2]", PREEMPTED),
    ("compute", None, "Instance was preempted. compute.instances.preempted", PREEMPTED),
    ("form", 9, "the node has been preempted during its creation", PREEMPTED),
    ("form", None, '"state": {"state": "SUSPENDED", "stateInitiator": "SERVICE"}', PREEMPTED),
    # --- Access to a location
    ("sayouzone", 7, "Permission denied on 'locations/us-central2-b' (or it may not exist).",
     ZONE_DENIED),
    ("sayouzone", 7, "Permission denied on 'locations/us-central2-b' (or it may not exist). "
     "[LOCATION_POLICY_VIOLATED us-central2-b]", ZONE_DENIED),
    ("firebase", 7, "Region access is unavailable. [LOCATION_POLICY_VIOLATED]", ZONE_DENIED),
    ("form", 7, "Permission denied on resource 'projects/p/locations/us-east1-d' (or it may not "
     "exist).", ZONE_DENIED),
    ("marin", 5, "Location us-east5-b is not found or access is unauthorized.", ZONE_DENIED),
    ("users", 7, "User does not have permission to submit requests into this queue for "
     "accelerator type v5p-8 in location us-east1-d.", ZONE_DENIED),
    ("marin", 7, "Permission 'tpu.nodes.list' denied on 'projects/p/locations/us-central2-b'",
     ZONE_DENIED),
    ("orgpolicy", 9, "us-east5-a violates constraint constraints/gcp.resourceLocations on the "
     "resource projects/p.", ZONE_DENIED),
    # --- Organization policies
    ("codelabs", 9, "Constraint constraints/compute.vmExternalIpAccess violated for project 1. "
     "Add instance projects/p/zones/us-central1-f/instances/n to the constraint to use external "
     "IP with it.", POLICY),
    ("fortinet", 9, "Constraint constraints/compute.requireShieldedVm violated for project "
     "projects/p. The boot disk's 'initialize_params.source_image' field specifies a non-Shielded "
     "image", POLICY),
    ("gke", 9, "CONDITION_NOT_MET: Instance 'n' creation failed: Constraint "
     "constraints/compute.vmExternalIpAccess violated for project 1.", POLICY),
    ("form", 9, "Operation denied by org policy: [\"constraints/compute.restrictVpcPeering\" : "
     "\"violated\"].", POLICY),
    ("vpc", 7, "Request is prohibited by organization's policy. "
     "vpcServiceControlsUniqueIdentifier: abc", PROJECT_DENIED),
    # --- The project and its permissions
    ("qwiklabs", 7, "Cloud TPU API has not been used in project 1 before or it is disabled. "
     "Enable it by visiting https://console.developers.google.com/apis/api/tpu.googleapis.com/"
     "overview?project=1 then retry. [SERVICE_DISABLED]", PROJECT_DENIED),
    ("compute", 7, "Access Not Configured. [accessNotConfigured]", PROJECT_DENIED),
    ("docs", 7, "This API method requires billing to be enabled. Please enable billing on project "
     "#1 [BILLING_DISABLED]", PROJECT_DENIED),
    ("ctpu", 7, "cannot create a TPU Node on a project linked to a free-trial billing account",
     PROJECT_DENIED),
    ("docs", 7, "The billing account for the owning project is disabled in state absent",
     PROJECT_DENIED),
    ("ctpu", 7, "Read access to project 'test' was denied", PROJECT_DENIED),
    ("docs", 7, "Permission denied: Consumer 'project:p' has been suspended. "
     "[CONSUMER_SUSPENDED]", PROJECT_DENIED),
    ("tensorflow", 7, "Permission 'tpu.nodes.get' denied on "
     "'projects/p/locations/us-central1-b/nodes/ai'", PROJECT_DENIED),
    ("docs", 7, "Permission 'tpu.queuedResources.create' denied on resource "
     "'//tpu.googleapis.com/projects/p/locations/us-central2-b' (or it may not exist). "
     "[IAM_PERMISSION_DENIED]", PROJECT_DENIED),
    ("form", 7, "The caller does not have permission [IAM_PERMISSION_DENIED tpu.nodes.delete]",
     PROJECT_DENIED),
    ("cml", 7, "Required 'compute.machineTypes.get' permission for "
     "'projects/p/zones/us-central1-a/machineTypes/n1'", PROJECT_DENIED),
    ("vertex", 3, "You do not have permission to act as service_account: "
     "[1-compute@developer.gserviceaccount.com]. (or it may not exist).", PROJECT_DENIED),
    ("compute", 3, "The user does not have access to service account "
     "'1-compute@developer.gserviceaccount.com'. User: 'a@b.c'. Ask a project owner to grant you "
     "the iam.serviceAccountUser role on the service account", PROJECT_DENIED),
    ("docs", 7, "Caller does not have required permission to use project p. Grant the caller the "
     "roles/serviceusage.serviceUsageConsumer role [USER_PROJECT_DENIED]", PROJECT_DENIED),
    ("docs", 7, "Request had insufficient authentication scopes. "
     "[ACCESS_TOKEN_SCOPE_INSUFFICIENT]", PROJECT_DENIED),
    ("grpc", 7, "The caller does not have permission", PROJECT_DENIED),
    # --- The login
    ("docs", 16, "Request had invalid authentication credentials. Expected OAuth 2 access token, "
     "login cookie or other valid authentication credential.", LOGIN),
    ("docs", None, "Request is missing required authentication credential.", LOGIN),
    ("google-auth", None, "('invalid_grant: Bad Request', {'error': 'invalid_grant', "
     "'error_description': 'Bad Request'})", LOGIN),
    ("google-auth", None, "Reauthentication is needed. Please run `gcloud auth "
     "application-default login` to reauthenticate.", LOGIN),
    ("gcloud", None, "There was a problem refreshing your current auth tokens: "
     "Reauthentication failed. cannot prompt during non-interactive execution.", LOGIN),
    ("google-auth", None, "invalid_rapt: reauth related error (invalid_rapt)", LOGIN),
    ("google-auth", None, "Token has been expired or revoked.", LOGIN),
    ("google-auth", None, "Your default credentials were not found. To set up Application Default "
     "Credentials, see https://cloud.google.com/docs/authentication", LOGIN),
    # --- A zone that does not offer what was requested
    ("gemma4", 3, 'Cloud TPU received a bad request. The requested zone "asia-northeast1-a" is not '
     "supported. [EID: 0x1994f24467802754]", ZONE_INVALID),
    ("gemma4", 3, "Cloud TPU received a bad request. The requested accelerator configuration for "
     'accelerator type, "v6e-1", could not be found in the zonal accelerator configurations for '
     '"asia-east1-a".; the accelerator v6e-1 was not found in zone asia-east1-a [EID: 0x362c]',
     ZONE_INVALID),
    ("gemma4", 3, 'FLEX_START provisioning model is not supported for accelerator type "v6e-1" in '
     'location "asia-east1-c"', ZONE_INVALID),
    ("skypilot", 3, 'CloudTpu received an invalid AcceleratorType, "v3-8" for zone '
     '"us-central1-c". Valid values are "v2-8, ".', ZONE_INVALID),
    ("kinetic", 3, 'Invalid machine type "e2-standard-4" in zone "us-central2-b": GCE_NOT_FOUND',
     ZONE_INVALID),
    ("fastai", 5, "The resource 'projects/p/zones/us-west1-b/acceleratorTypes/nvidia-tesla-p4' "
     "was not found", ZONE_INVALID),
    ("form", 3, "Runtime version v2-alpha-tpuv6e is not available in zone us-central1-b.",
     ZONE_INVALID),
    ("form", 3, "SPOT provisioning model is not supported for accelerator type v4-8 in this "
     "location", ZONE_INVALID),
    ("form", 12, "v5p is not enabled in europe-west4-b for this project tier", ZONE_INVALID),
    ("form", 3, "The accelerator type v4-4096 cannot be used in location us-central2-b",
     ZONE_INVALID),
    ("gemma4", 3, "Queueing is not supported for accelerator type v5litepod-8 in location "
     "us-east5-a", ZONE_INVALID),
    ("gemma4", 3, "No default subnetwork was found in the region of the instance.", ZONE_INVALID),
    ("form", 3, "Network default does not have a subnetwork in region us-east5", ZONE_INVALID),
    ("compute", 3, "Invalid value for field 'zone': 'us-central9-z'. Unknown zone.", ZONE_INVALID),
    ("gemma4", 7, "This user agent is not allowed to use the machine type [ct5lp-hightpu-1t]",
     ZONE_INVALID),
    # --- Reservations
    ("terraform", 3, "Cloud TPU received an invalid argument. A target reservation must be "
     "specified when the host project has at least one", INVALID),
    ("terraform", 10, "A target reservation must be specified", INVALID),
    ("terraform", 8, "A target reservation must be specified", INVALID),
    ("gemma4", 5, "Reservation not found", ZONE_INVALID),
    ("form", 3, "Reservation 'projects/p/zones/us-east5-a/reservations/r' does not exist.",
     ZONE_INVALID),
    ("form", 9, "The specified reservation r has expired.", ZONE_INVALID),
    ("form", 9, "Specified reservation r does not have sufficient capacity for v6e-64", STOCKOUT),
    # --- A request that no zone accepts
    ("ctpu", 3, 'Cloud TPU received an invalid argument. The field "TensorflowVersion" cannot be '
     '"2.4". [EID: 0x90dfdfda32f61e59]', INVALID),
    ("cohere", 3, 'Cloud TPU received an invalid argument. The field "Range" cannot be '
     '"10.0.10.15.98.0.0". [EID: 0x552b9fbc08537008]', INVALID),
    ("terraform", 3, "Cloud TPU received an invalid argument. The 'CIDR Range' value "
     "\"10.2.0.0/29\" on network \"default\" conflicts with another subnet or object in the "
     "(peered) customer network.", INVALID),
    ("terraform", 3, "Cloud TPU received a bad request. NetworkConfig and NetworkConfigs fields "
     "are exclusive, please provide at most one. [EID: 0x992b93e7f0aa837a]", INVALID),
    ("rest", 3, "Invalid JSON payload received. Unknown name \"colour\" at 'queued_resource': "
     "Cannot find field.", INVALID),
    ("form", 3, "Invalid value at 'queued_resource.tpu.node_spec[0].node.labels'", INVALID),
    ("form", 3, "node_id must match the regular expression [a-z]([a-z0-9-]*[a-z0-9])?", INVALID),
    ("compute", 5, "The resource 'projects/p/global/networks/train' was not found", INVALID),
    ("form", 9, "Service account a@p.iam.gserviceaccount.com does not exist or is disabled.",
     INVALID),
    ("form", 5, "Service account train@p.iam.gserviceaccount.com does not exist.", INVALID),
    # --- Another change, or the same request before
    ("jobman", 10, "unable to queue the operation", CONFLICT),
    ("skypilot", 6, "Resource 'projects/p/locations/z/nodes/n' already exists", CONFLICT),
    ("compute", 2, "RESOURCE_NOT_READY", CONFLICT),
    ("compute", 3, "The resource 'projects/p/regions/r/subnetworks/default' is not ready",
     CONFLICT),
    # --- The cloud failed
    ("terraform", 13, "an internal error has occurred", TRANSIENT),
    ("gemma4", None, "an internal error has occurred", TRANSIENT),
    ("grpc", 14, "The service is currently unavailable.", TRANSIENT),
    ("grpc", 13, "Internal error encountered.", TRANSIENT),
    ("docs", 4, "Deadline expired before operation could complete.", TRANSIENT),
    ("kubernetes", None, "Backend Error", TRANSIENT),
    ("proxy", 14, "502 Bad Gateway", TRANSIENT),
    ("google", 14, "Error 502 (Server Error)!!1", TRANSIENT),
    ("drumline", None, "no answer from tpu.googleapis.com: ConnectTimeout", TRANSIENT),
    ("drumline", None, "no answer from tpu.googleapis.com: the response is not JSON: '<html>the "
     "page in this location was not found'", TRANSIENT),
    ("gemma4", None, "FailedScaleUp: Internal error", TRANSIENT),
    # --- Not found
    ("rest", 5, "Resource 'projects/p/locations/us-central2-b/nodes/n' was not found", NOT_FOUND),
    ("rest", 5, "Resource 'projects/p/locations/us-central2-b/queuedResources/q' was not found",
     NOT_FOUND),
    # --- More texts of APIs, gcloud and google-auth
    ("form", 8,
     "Quota limit 'TPUV6EPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 "
     "in zone us-east5-b.",
     ZONE_QUOTA),
    ("form", 8,
     "QUOTA_EXCEEDED: Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 32.0 in "
     "region us-east5.\n\tmetric name = "
     "compute.googleapis.com/tpus_per_tpu_family\n\tdimensions = region: "
     "us-east5, tpu_family: CT6E",
     REGION_QUOTA),
    ("form", 3,
     "Request contains an invalid argument.",
     INVALID),
    ("form", 13,
     "An internal error occurred while processing your request. Retry the request "
     "or contact support. [EID: 0x1]",
     TRANSIENT),
    ("form", 10,
     "The operation was aborted.",
     CONFLICT),
    ("form", 7,
     "The user does not have permission to act as service account "
     "'1-compute@developer.gserviceaccount.com'.",
     PROJECT_DENIED),
    ("form", 9,
     "Operation denied by org policy on resource "
     "'projects/1/locations/europe-west4-a': "
     "[\"constraints/gcp.resourceLocations\": \"The policy forbids "
     "europe-west4-a\"].",
     ZONE_DENIED),
    ("form", 9,
     "Operation denied by org policy: "
     "[\"constraints/gcp.restrictNonCmekServices\": \"The project cannot use "
     "tpu.googleapis.com without a CMEK\"].",
     POLICY),
    ("form", 3,
     "Constraint constraints/compute.trustedImageProjects violated for project p. "
     "Use of images from project cloud-tpu-v2-images is prohibited.",
     POLICY),
    ("form", 5,
     "Resource 'projects/p/locations/us-east5-b/acceleratorTypes/v6e-256' was not "
     "found",
     ZONE_INVALID),
    ("form", 3,
     "Cloud TPU received a bad request. Runtime version v2-alpha-tpuv6e does not "
     "support accelerator type v5litepod-8. [EID: 0x2]",
     INVALID),
    ("form", None,
     "HTTPSConnectionPool(host='tpu.googleapis.com', port=443): Max retries "
     "exceeded with url: /v2/projects/p (Caused by NewConnectionError('Failed to "
     "establish a new connection: [Errno -3] Temporary failure in name "
     "resolution'))",
     TRANSIENT),
    ("form", None,
     "ERROR: (gcloud.compute.tpus.tpu-vm.create) You do not currently have an "
     "active account selected.\nPlease run:\n\n  $ gcloud auth login",
     LOGIN),
    ("form", None,
     "google.auth.exceptions.RefreshError: Reauthentication is needed. Please run "
     "`gcloud auth application-default login` to reauthenticate.",
     LOGIN),
    ("form", None,
     "google.auth.exceptions.TransportError: Failed to retrieve "
     "http://metadata.google.internal/computeMetadata/v1/ from the Google Compute "
     "Engine metadata service. Compute Engine Metadata server unavailable after 5 "
     "attempts",
     TRANSIENT),
    ("form", None,
     "google.auth.exceptions.DefaultCredentialsError: Your default credentials "
     "were not found. To set up Application Default Credentials, see "
     "https://cloud.google.com/docs/authentication/external/set-up-adc for more "
     "information.",
     LOGIN),
    ("form", None,
     "google.auth.exceptions.DefaultCredentialsError: File /home/me/key.json was "
     "not found.",
     LOGIN),
    ("form", 7,
     "Project '1' has been deleted.",
     PROJECT_DENIED),
    ("form", 3,
     "The referenced network resource cannot be found: "
     "projects/p/global/networks/default",
     INVALID),
    ("form", 8,
     "IP_SPACE_EXHAUSTED_WITH_DETAILS: Instance 'w-0' creation failed: IP space "
     "of 'projects/p/regions/us-east5/subnetworks/default-1' is exhausted. The "
     "subnetwork does not have enough free IP addresses.",
     REGION_QUOTA),
    ("form", None,
     "Instance creation failed: IP space of "
     "'projects/p/regions/us-west4/subnetworks/tpu' is exhausted.",
     REGION_QUOTA),
    ("form", 9,
     "Insufficient regional quota to satisfy request: resource \"CPUS\": request "
     "requires '208.0' and is short '8.0'. project has a quota of '200.0' with "
     "'200.0' available.",
     REGION_QUOTA),
    ("form", 7,
     "Required 'compute.subnetworks.use' permission for "
     "'projects/host/regions/us-east5/subnetworks/s'",
     PROJECT_DENIED),
    ("form", 3,
     "maxRunDuration must be between 10 minutes and 7 days",
     INVALID),
    ("form", 1,
     "The operation was cancelled.",
     TRANSIENT),
    ("form", 7,
     "Permission denied on resource project x-123. [CONSUMER_INVALID]",
     PROJECT_DENIED),
    ("form", 7,
     "Caller is missing IAM permission 'tpu.nodes.create' on project p.",
     PROJECT_DENIED),
    ("form", 7,
     "Your client does not have permission to get URL "
     "/v2/projects/p/locations/us-east5-a/nodes from this server.",
     PROJECT_DENIED),
    ("form", 9,
     "Queued resource 'qr' failed: node creation failed: The zone "
     "'projects/p/zones/us-east5-b' does not have enough resources available to "
     "fulfill the request '(resource type:compute)'.",
     STOCKOUT),
    ("form", 8,
     "Spot capacity is not available right now in us-east5-a. Please try again "
     "later.",
     STOCKOUT),
    ("form", 9,
     "There is insufficient spot capacity in this zone; the queued resource "
     "remains in WAITING_FOR_RESOURCES.",
     STOCKOUT),
    ("form", 13,
     "Failed to create TPU VM: HEALTH_CHECK_FAILED",
     TRANSIENT),
    ("form", 3,
     "Invalid value for field 'resource.scheduling': Spot and reserved are "
     "mutually exclusive.",
     INVALID),
    ("form", 9,
     "Reservation 'r' in zone us-east5-a has no remaining capacity.",
     STOCKOUT),
    ("form", 9,
     "Specified reservation [r] has 0 available resources, 16 requested.",
     STOCKOUT),
    ("form", 3,
     "The specified reservation [r] does not have available resources for the "
     "request.",
     STOCKOUT),
    ("form", 7,
     "API key not valid. Please pass a valid API key.",
     PROJECT_DENIED),
    ("form", None,
     "curl: (28) Operation timed out after 30001 milliseconds with 0 bytes "
     "received",
     TRANSIENT),
    ("form", 16,
     "Request is missing required authentication credential. Expected OAuth 2 "
     "access token.",
     LOGIN),
    ("form", 8,
     "Too many queued resources in project p, location us-east5-a. The maximum is "
     "100.",
     REGION_QUOTA),
    ("form", 3,
     "Accelerator type v6e-12 is not valid. Valid values are v6e-1, v6e-4, v6e-8.",
     INVALID),
)  # fmt: skip


@pytest.mark.parametrize(
    ("code", "text", "fault"),
    [pytest.param(*row[1:], id=f"{n}-{row[0]}") for n, row in enumerate(ANSWERS)],
)
def test_a_recorded_answer_is_judged_right(code: int | None, text: str, fault: Fault) -> None:
    assert classify(code, text) == fault


@pytest.mark.parametrize(
    ("code", "text", "fault"),
    [pytest.param(*row[1:], id=f"{n}-{row[0]}") for n, row in enumerate(ANSWERS) if row[1]],
)
def test_its_copy_in_json_is_judged_alike(code: int, text: str, fault: Fault) -> None:
    copies = [
        {"error": {"code": code, "message": text}},
        {"code": code, "message": text},
        {"name": "operation", "done": True, "error": {"code": code, "message": text}},
        {"state": {"state": "FAILED", "failedData": {"error": {"code": code, "message": text}}}},
    ]
    for copy in copies:
        assert classify(*parse_answer(json.dumps(copy), None, None)) == fault
    printed = f"ERROR: (gcloud.compute.tpus.tpu-vm.create) {json.dumps(copies[1], indent=2)}"
    assert classify(*parse_answer(printed, None, None)) == fault


def test_reasons_in_the_details_are_judged() -> None:
    def body(reason: str, **metadata: str) -> bytes:
        detail = {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": reason,
            "metadata": metadata,
        }
        error = {"code": 403, "message": "No.", "status": "PERMISSION_DENIED", "details": [detail]}
        return json.dumps({"error": error}).encode()

    expected = {
        body("LOCATION_POLICY_VIOLATED", location="us-central2-b"): ZONE_DENIED,
        body("IAM_PERMISSION_DENIED", permission="tpu.nodes.create"): PROJECT_DENIED,
        body("RATE_LIMIT_EXCEEDED", quota_limit="ReadsPerMinutePerProject"): RATE,
        body("SERVICE_DISABLED"): PROJECT_DENIED,
    }
    for answer, fault in expected.items():
        response = parse_error(403, answer, {}, datetime.now(UTC))
        assert classify(response.code, response.text) == fault
    response = parse_error(403, body("IAM_PERMISSION_DENIED", permission="tpu.nodes.create"), {},
                           datetime.now(UTC))  # fmt: skip
    assert "tpu.nodes.create" in explain(response.code, response.text, "z").sentence


@pytest.mark.parametrize("http", [400, 404, 405, 413, 418, 500, 502, 503, 504])
@pytest.mark.parametrize("body", [b"", b"<html><title>Error</title></html>", b"not found"])
def test_an_html_page_or_an_empty_body_decides_nothing_about_the_request(
    http: int, body: bytes
) -> None:
    response = parse_error(http, body, {}, datetime.now(UTC))
    assert classify(response.code, response.text) == TRANSIENT


@pytest.mark.parametrize(
    ("permission", "role"),
    [
        ("tpu.nodes.get", "roles/tpu.viewer"),
        ("tpu.queuedResources.list", "roles/tpu.viewer"),
        ("tpu.queuedResources.create", "roles/tpu.admin"),
        ("iam.serviceAccounts.actAs", "roles/iam.serviceAccountUser"),
        ("iam.serviceAccounts.getAccessToken", "roles/iam.serviceAccountTokenCreator"),
        ("serviceusage.services.use", "roles/serviceusage.serviceUsageConsumer"),
        ("serviceusage.services.enable", "roles/serviceusage.serviceUsageAdmin"),
        ("compute.networks.use", "roles/compute.networkUser"),
        ("compute.subnetworks.useExternalIp", "roles/compute.networkUser"),
        ("compute.machineTypes.get", "roles/compute.viewer"),
        ("compute.instances.create", "roles/compute.instanceAdmin.v1"),
        ("storage.objects.get", "roles/storage.objectViewer"),
        ("pubsub.topics.publish", "a role that has it"),
    ],
)
def test_a_missing_permission_names_the_role_that_has_it(permission: str, role: str) -> None:
    text = f"Permission '{permission}' denied on 'projects/p' (or it may not exist)."
    meaning = explain(7, text, "us-central2-b")
    assert permission in meaning.sentence
    assert role in meaning.advice


@pytest.mark.parametrize("needed", PERMISSIONS, ids=lambda needed: needed.name)
def test_errors_name_the_roles_that_the_probe_names(needed: Permission) -> None:
    assert needed.role in role_of(needed.name)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("Compute Engine API has not been used in project 1 before or it is disabled. Enable it "
         "by visiting https://console.developers.google.com/apis/api/compute.googleapis.com/",
         "gcloud services enable compute.googleapis.com"),
        ("This API method requires billing to be enabled.", "billing account"),
        ("Constraint constraints/compute.vmExternalIpAccess violated for project 1.",
         "external_ip: false"),
        ("Constraint constraints/compute.requireShieldedVm violated for project 1.",
         "constraints/compute.requireShieldedVm"),
        ("A target reservation must be specified", "set `reservation` in the job file"),
    ],
)  # fmt: skip
def test_the_advice_names_what_to_change(text: str, advice: str) -> None:
    assert advice in explain(7, text, "us-central2-b").advice
