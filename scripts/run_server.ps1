#!/usr/bin/env pwsh
# What run_server.sh does, for PowerShell on Linux and macOS; on Windows it is run_server.sh within WSL, since the server
# needs a Unix. Arguments are those of `ostro serve`, and so are the OSTRO_..., AIOS_... and other variables that
# docs/configuration.md lists.
#
#   scripts/run_server.ps1 --port 9000 ./my-model
$ErrorActionPreference = 'Stop'

$script = Join-Path $PSScriptRoot 'run_server.sh'
$onWindows = [System.Environment]::OSVersion.Platform -eq [System.PlatformID]::Win32NT

if (-not $onWindows) {
    & sh $script @args
    exit $LASTEXITCODE
}

if (-not (Get-Command wsl.exe -ErrorAction SilentlyContinue)) {
    [Console]::Error.WriteLine('run_server.ps1: the server needs Linux. Install WSL (wsl --install), and run this again.')
    exit 1
}

# WSL takes over the variables that WSLENV names.
$ours = '^(OSTRO_|AIOS_|HF_|GCS_|AWS_|PORT$|LOCAL_DEV$|LOCAL_MODEL_CACHE$|LEVANTER_API_KEY$|REQUEST_TIMEOUT$|MAX_CACHED_MODELS$|MAX_CONCURRENT_REQUESTS$|DEFAULT_MAX_TOKENS$|DEFAULT_TEMPERATURE$)'
$names = @(Get-ChildItem Env: | Where-Object { $_.Name -match $ours } | ForEach-Object { $_.Name })
$env:WSLENV = (@($env:WSLENV) + $names | Where-Object { $_ }) -join ':'

$root = Split-Path -Parent $PSScriptRoot
& wsl.exe --cd $root sh scripts/run_server.sh @args
exit $LASTEXITCODE
